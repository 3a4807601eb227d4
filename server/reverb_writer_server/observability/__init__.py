"""The reports of a server about itself: banner, log lines, metrics, status page."""
