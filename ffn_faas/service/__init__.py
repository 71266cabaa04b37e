"""The daemon around a backend: lifecycle, world, sessions, the step loop, and the order they start and stop in."""
