"""Tests of the book's site, which `make test-book` runs: they need the site's tools and a browser."""
