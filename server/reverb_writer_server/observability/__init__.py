"""What a server reports about itself: banner, log lines, metrics, status page."""
