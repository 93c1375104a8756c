"""The comparisons. Each function runs the rounds of one and puts its samples into the results."""
