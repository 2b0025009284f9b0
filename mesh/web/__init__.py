"""Files of the web page: HTML, CSS and JavaScript."""
