"""`python -m train.bench`: what training costs: a step, its attention, its input, a pod."""
