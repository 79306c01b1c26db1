"""What people look at: tables and the terminal's progress view."""
