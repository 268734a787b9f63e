"""The engine: torch alone. One weight update, replicas, stages over processes, schedules, recomputation, seeding, collectives."""
