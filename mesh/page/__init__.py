"""The page at `/`: plain HTML, CSS and ES modules, sent as they are. See `mesh.api.page`."""
