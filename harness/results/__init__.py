"""The folder of one run: its records, written and read, and the summary made of them."""
