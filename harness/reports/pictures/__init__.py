"""The pictures of a report, drawn with matplotlib, each as PNG and PDF."""
