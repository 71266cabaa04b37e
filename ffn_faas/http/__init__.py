"""The management port: probes, status, metrics, stop, and the control sockets of A ranks and F ranks."""
