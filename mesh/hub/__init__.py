"""Models from a hub: named, chosen, pulled, listed, removed."""
