"""What a recipe is made of: optimizers, schedules in weight updates, the classifier, averages of weights."""
