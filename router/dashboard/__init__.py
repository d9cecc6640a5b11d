"""The page on which people watch the pools and tune them: a process of its own, which asks the router.

`server` puts it together; `static/` is the page, plain ES modules that a browser reads as they are.
"""
