"""Where data comes from: files and folders here, archives, web servers and object stores."""
