"""Acceptance tests of this program itself, run from a checkout: installed packages come without them."""
