"""What type checkers know of the names that the package loads when they are first used."""

from lightning_ipu.command.profiling import ProfileReports as ProfileReports
from lightning_ipu.command.slowdown import SlowdownWatch as SlowdownWatch
from lightning_ipu.loop.events import EventsPerEpoch as EventsPerEpoch
from lightning_ipu.plan import Plan as Plan
from lightning_ipu.plan import PlanError as PlanError
from lightning_ipu.recipe.averaging import AveragedWeights as AveragedWeights
from lightning_ipu.recipe.classifier import ImageClassifier as ImageClassifier
from lightning_ipu.strategy import IPUStrategy as IPUStrategy

__version__: str
