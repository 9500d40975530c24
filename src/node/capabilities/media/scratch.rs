//! A folder for a file that exists for the length of one call.

use std::io;
use std::path::{Path, PathBuf};

use uuid::Uuid;

/// A new folder that only this user may look into. It goes away with everything in it when this is dropped.
#[derive(Debug)]
pub struct Scratch(PathBuf);

impl Scratch {
    /// Creates one among the system's temporary files.
    ///
    /// # Errors
    /// If that is not possible.
    pub fn new() -> io::Result<Self> {
        let path = std::env::temp_dir().join(format!("openclaw-{}", Uuid::new_v4().simple()));
        #[cfg_attr(not(unix), expect(unused_mut, reason = "there are no modes to be set"))]
        let mut folder = std::fs::DirBuilder::new();
        #[cfg(unix)]
        std::os::unix::fs::DirBuilderExt::mode(&mut folder, 0o700);
        folder.create(&path)?;
        Ok(Scratch(path))
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        if let Err(error) = std::fs::remove_dir_all(&self.0) {
            tracing::warn!(%error, "a temporary folder is left behind");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_private_and_goes_away_with_its_files() {
        let scratch = Scratch::new().unwrap();
        let path = scratch.path().to_owned();
        std::fs::write(path.join("video.mp4"), "secret").unwrap();
        #[cfg(unix)]
        assert_eq!(std::os::unix::fs::PermissionsExt::mode(&path.metadata().unwrap().permissions()) & 0o777, 0o700);
        drop(scratch);
        assert!(!path.exists());
    }
}
