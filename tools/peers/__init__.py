"""Other engines beside jserve: their environments, the model as they want it, and clients that run inside them."""
