"""Sources of data: local files and folders, archives, web servers and object stores."""
