"""What an audit does with one mechanism."""
