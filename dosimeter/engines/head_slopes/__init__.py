"""The head's gradient, taken apart into features and slopes under any loss."""
