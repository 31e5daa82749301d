"""Tables and figures of the papers: settings, published values, our results."""
