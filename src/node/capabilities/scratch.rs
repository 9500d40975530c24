//! Folders for files that helper programs write or read, and that nobody else may.

use std::io;
use std::path::{Path, PathBuf};

use uuid::Uuid;

/// A folder that is gone with this value.
#[derive(Debug)]
pub(super) struct Scratch(PathBuf);

impl Scratch {
    /// A new, empty one that is only for this user.
    ///
    /// # Errors
    /// If it cannot be made.
    pub(super) fn new() -> io::Result<Self> {
        let path = std::env::temp_dir().join(format!("openclaw-node-{}", Uuid::new_v4().simple()));
        create(&path)?;
        Ok(Scratch(path))
    }

    /// Where it is.
    pub(super) fn path(&self) -> &Path {
        &self.0
    }
}

#[cfg(unix)]
fn create(path: &Path) -> io::Result<()> {
    use std::os::unix::fs::DirBuilderExt;
    std::fs::DirBuilder::new().mode(0o700).create(path)
}

/// The folder for temporary files is the user's own.
#[cfg(not(unix))]
fn create(path: &Path) -> io::Result<()> {
    std::fs::create_dir(path)
}

impl Drop for Scratch {
    fn drop(&mut self) {
        if let Err(error) = std::fs::remove_dir_all(&self.0) {
            tracing::debug!(%error, "a temporary folder is left behind");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_private_and_goes_with_its_files() {
        let scratch = Scratch::new().unwrap();
        let path = scratch.path().to_owned();
        std::fs::write(path.join("file"), "x").unwrap();
        #[cfg(unix)]
        assert_eq!(std::os::unix::fs::PermissionsExt::mode(&path.metadata().unwrap().permissions()) & 0o777, 0o700);
        drop(scratch);
        assert!(!path.exists());
    }
}
