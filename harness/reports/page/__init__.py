"""The report as one page that needs nothing else: no server, no network, no build."""
