"""What nodetrack costs, beside what is used instead of it: `make bench`."""
