"""What can be said without running: machines as data, costs by formula, times by walking schedules."""
