"""``rose demo``: the whole job on one machine without a GPU, measured and written down."""
