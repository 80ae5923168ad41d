"""From the words of a command line to checked settings and plug-ins; what can be named, and what an error says."""
