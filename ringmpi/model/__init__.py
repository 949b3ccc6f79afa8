"""What can be said without running: costs by formula."""
