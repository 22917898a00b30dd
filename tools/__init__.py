"""Programs for maintainers. The package does not have them."""
