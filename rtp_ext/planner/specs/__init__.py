"""What is planned: the model, the cluster it runs on, and the strategy."""
