"""What the store does beside the model's own work: it reads ahead, hands over layer by layer, writes behind."""
