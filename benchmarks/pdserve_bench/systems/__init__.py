"""What is measured against each other: each system is started and stopped here, and gets the same load in turn."""
