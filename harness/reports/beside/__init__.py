"""Tables that stand beside the main one: costs, turns."""
