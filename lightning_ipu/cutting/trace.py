"""Trace a network's forward: what it calls, in order, and which values go from call to call.

The unmodified forward runs once, on tensors without data, under a tracer. Alternatives: torch.export refuses a value that feeds more than one later stage; torch.fx's own tracer refuses
control flow on shapes, and freezes `self.training` and `torch.no_grad` without a word. Here shapes are part of the trace, so it is valid for
micro-batches of one shape only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_ipu.cutting.tensors import TENSOR, Spec, example, flatten, unflatten
from lightning_ipu.cutting.tracer import STATIC, Tracer, WatchDraws, plain, watched
from lightning_ipu.cutting.trial import borrowed
from lightning_ipu.plan import PlanError

MakeContext = Callable[[], AbstractContextManager]


class Trace:
    """A traced forward: its nodes in order, its structure, and which state is used where."""

    def __init__(
        self,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        goes_into: Callable[[str, nn.Module], bool],
        *,
        training: bool,
        context: MakeContext,
    ) -> None:
        self.module = module
        tracer = Tracer(module, goes_into)
        try:
            self._run(tracer, args, kwargs, training=training, context=context, fake=FakeTensorMode(allow_non_fake_inputs=True))
        except PlanError:
            raise
        except Exception:
            if tracer.leaf is None:
                raise
            # A submodule whose control flow asks for data gets some; it may do what it likes in there.
            tracer = Tracer(module, goes_into)
            self._run(tracer, args, kwargs, training=training, context=context, fake=None)
        self.order, self.entries, self.opened, self.uses = tracer.order, tracer.entries, set(tracer.opened), tracer.uses
        self.called = Counter(name for name, _ in self.entries)
        self.constants: set[fx.Node] = set()  # made of nothing: made anew in each stage instead of crossing cuts
        self._last_use: dict[fx.Node, int] = {}
        for place, node in enumerate(self.order):
            steady = node.meta["steady"] and not node.meta["changes"] and node.meta.get("storage") not in tracer.changed
            if steady and all(source in self.constants for source in node.all_input_nodes):
                self.constants.add(node)
            else:
                self._last_use.update(dict.fromkeys(node.all_input_nodes, place))
        self._last_use.update(dict.fromkeys(self.outputs, len(self.order)))

    def _run(
        self,
        tracer: Tracer,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        training: bool,
        context: MakeContext,
        fake: FakeTensorMode | None,
    ) -> None:
        module = self.module
        given, self.input_structure = flatten((args, kwargs))
        device = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
        with ExitStack() as stack:
            for entered in (
                torch.inference_mode(False),
                borrowed(module, training=training, fake=fake),
                fake,
                torch.enable_grad(),
                torch.compiler.set_stance("force_eager"),  # so that compiled modules can be traced, they run uncompiled
                context(),
            ):
                stack.enter_context(entered or nullcontext())
            stack.callback(torch.clear_autocast_cache)
            inputs = [example(tensor, device, with_data=fake is None) for tensor in given]
            tracer.begin()
            self.names: dict[Any, list[str]] = {}
            for name, key in tracer.keys.items():
                self.names.setdefault(key, []).append(name)
            self.inputs = [tracer.placeholder(tensor) for tensor in inputs]
            forward, (args, kwargs) = module.forward, unflatten(inputs, self.input_structure)
            with watched(tracer), WatchDraws(tracer), tracer:
                output = forward(*args, **kwargs)
                tracer.check_host_streams()
            self.read, self.left = tracer.read, tracer.left
            if changed := self.changed():
                raise tracer.refusal(f"changes what {changed} holds, which a stage would not do")
            tensors, self.output_structure = flatten(output)
            for leaf in self.output_structure[0]:
                if leaf is not TENSOR and not isinstance(leaf, STATIC):
                    raise PlanError(
                        f"{type(module).__name__}.forward returns a {type(leaf).__name__}; in a pipeline only tensors, numbers, strings and"
                        " tuples, lists and dicts of them can be returned"
                    )
            if not tensors:
                raise PlanError(f"{type(module).__name__}.forward returns no tensor, so that nothing can be pipelined")
            self.outputs = [tracer.node_of(tensor) for tensor in tensors]
            tracer.end()

    def crossing(self, place: int) -> list[fx.Node]:
        """The nodes whose values cross a cut before the node in a place: made before, needed there or later."""
        made = [*self.inputs, *self.order[:place]]
        return [node for node in made if self._last_use.get(node, -1) >= place and node not in self.constants]

    def aliased(self, place: int) -> bool:
        """Whether values that cross a cut share memory that is changed in place after it: on the other side they would be separate."""
        changed = set().union(*(node.meta["changes"] for node in self.order[place:]))
        shared = Counter(node.meta["storage"] for node in self.crossing(place))
        return any(count > 1 and storage in changed for storage, count in shared.items())

    def changed(self) -> str:
        """Name of an attribute that the forward read and that has changed since; empty if there is none."""
        for (path, name), before in self.read.items():
            if plain(getattr(self.module.get_submodule(path), name, None)) != before:
                return f"{path}.{name}" if path else name
        return ""

    def spec(self, node: fx.Node) -> Spec:
        """Shape, strides, dtype and requires_grad of a node's value."""
        return node.meta["spec"]

    def state_names(self, key: Any) -> str:
        """What messages call a state that more than one stage uses."""
        if isinstance(key, str):
            return f"the submodule {key!r}, which draws random numbers,"
        kind = "parameter" if self.names[key][0] in dict(self.module.named_parameters(remove_duplicate=False)) else "buffer"
        return f"the {kind} {' = '.join(map(repr, self.names[key]))}"
