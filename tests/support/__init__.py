"""What several test folders share: environments, a real engine, memory maps, the page cache."""
