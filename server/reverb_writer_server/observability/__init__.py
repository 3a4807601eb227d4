"""What a server tells about itself: banner, figures, metrics, HTTP."""
