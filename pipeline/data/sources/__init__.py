"""Where data come from (``dataset.source``): local files and folders, archives, web servers and object stores."""
