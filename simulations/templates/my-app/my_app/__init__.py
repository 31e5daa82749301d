"""my-app: vertical federated learning over three parties."""
