"""See `api_server.py`."""
