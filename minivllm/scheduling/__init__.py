"""Who computes what in each step: requests, schedulers, preemption (from chapter 6 on)."""
