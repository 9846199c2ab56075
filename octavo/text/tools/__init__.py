"""Tool calls: what a caller declares, and what a model wrote, as events.

`declare.py` checks the tools of a request, one small file for each way in which models write
calls, `choose.py` knows them all by name. Not for: HTTP. Next file: `events.py`.
"""
