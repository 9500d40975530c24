//! Reading and writing a file that nobody but its owner can have put there.
//!
//! A link, another name or another user could make it the file of somebody else's choice, so such a file is neither
//! read nor written.

use std::fs::{self, OpenOptions};
use std::io::{self, ErrorKind, Read, Write};
use std::path::{Path, PathBuf};

use crate::node::private_file;

/// A file that is longer is not read.
pub const MAX_BYTES: u64 = 1024 * 1024;
/// How often a file is opened anew that has been replaced meanwhile.
const MAX_TRIES: usize = 100;
/// What is said of a file that the system does not let be read.
const UNREADABLE: &str = "it cannot be read";

/// What is in a file; `None` if it is missing.
///
/// # Errors
/// Why it is not used.
pub fn read(path: &Path) -> Result<Option<Vec<u8>>, &'static str> {
    if path.ancestors().skip(1).any(is_strange_link) {
        return Err("a folder on the way to it is a link");
    }
    for _ in 0..MAX_TRIES {
        let before = match fs::symlink_metadata(path) {
            Ok(before) => before,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            Err(_) => return Err(UNREADABLE),
        };
        // Opening what is no file might wait for ever.
        if !before.is_file() {
            return Err("it is a link or no file");
        }
        let file = match fs::File::open(path) {
            Ok(file) => file,
            Err(error) if error.kind() == ErrorKind::NotFound => continue,
            Err(_) => return Err(UNREADABLE),
        };
        if !is_same(&before, &file.metadata().map_err(|_| UNREADABLE)?)? {
            continue;
        }
        let mut bytes = Vec::new();
        file.take(MAX_BYTES + 1).read_to_end(&mut bytes).map_err(|_| UNREADABLE)?;
        return if bytes.len() as u64 > MAX_BYTES { Err("it is too long") } else { Ok(Some(bytes)) };
    }
    Err("it changes all the time")
}

/// Whether what was opened is what was looked at. If not, another process has put a new file there in between.
///
/// # Errors
/// Why it is not used: it must be the owner's alone.
#[cfg(unix)]
fn is_same(before: &fs::Metadata, opened: &fs::Metadata) -> Result<bool, &'static str> {
    use std::os::unix::fs::MetadataExt;
    if (before.dev(), before.ino()) != (opened.dev(), opened.ino()) || opened.nlink() == 0 {
        return Ok(false);
    }
    if opened.nlink() > 1 {
        return Err("it has more than one name");
    }
    if opened.mode() & 0o022 != 0 {
        return Err("other users may write to it");
    }
    // Only Linux says without a call into C who we are.
    let user = fs::metadata("/proc/self").ok().map(|own| own.uid());
    if user.is_some_and(|user| user != opened.uid() && opened.uid() != 0) {
        return Err("it belongs to another user");
    }
    Ok(true)
}

#[cfg(not(unix))]
fn is_same(_: &fs::Metadata, _: &fs::Metadata) -> Result<bool, &'static str> {
    Ok(true)
}

/// Whether this is a link that could lead to a folder of somebody else's choice. A system's layout has links, too;
/// they are the administrator's, and close to the root.
fn is_strange_link(path: &Path) -> bool {
    let Ok(link) = fs::symlink_metadata(path) else { return false };
    #[cfg(unix)]
    let is_layout = std::os::unix::fs::MetadataExt::uid(&link) == 0 && path.components().count() <= 3;
    #[cfg(not(unix))]
    let is_layout = false;
    link.is_symlink() && !is_layout
}

/// Writes a file in one step. Whoever has it open keeps what was there before.
///
/// # Errors
/// If it cannot be written, or is not to be used.
pub fn write(path: &Path, bytes: &[u8]) -> io::Result<()> {
    // A link would lead elsewhere.
    read(path).map_err(|why| io::Error::new(ErrorKind::PermissionDenied, why))?;
    let temporary = with_suffix(path, &format!(".{}.tmp", private_file::random::<9>()?));
    let written = private().create_new(true).open(&temporary).and_then(|mut file| {
        file.write_all(bytes)?;
        file.sync_all()
    });
    written.and_then(|()| fs::rename(&temporary, path)).inspect_err(|_| {
        // It may be that it was never made.
        let _gone = fs::remove_file(&temporary);
    })
}

/// How a file is opened to write that is its owner's alone, if it is made.
pub fn private() -> OpenOptions {
    let mut options = OpenOptions::new();
    options.write(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    options
}

/// A path with something behind its last name.
pub fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    PathBuf::from(name)
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;
    use crate::node::approvals::Folder;
    use std::os::unix::fs::{PermissionsExt, symlink};

    #[test]
    fn what_somebody_else_could_have_put_there_is_neither_read_nor_written() {
        let folder = Folder::new();
        let data = folder.0.join("data");
        let (path, elsewhere) = (data.join("file"), folder.0.join("elsewhere"));
        fs::create_dir(&data).unwrap();
        let is_refused = |path: &Path| read(path).is_err() && write(path, b"new").is_err();
        fs::write(&elsewhere, "old").unwrap();
        symlink(&elsewhere, &path).unwrap();
        assert!(is_refused(&path), "a link");
        fs::remove_file(&path).unwrap();
        symlink("nowhere", &path).unwrap();
        assert!(is_refused(&path), "a link to nothing");
        fs::remove_file(&path).unwrap();
        fs::hard_link(&elsewhere, &path).unwrap();
        assert!(is_refused(&path), "another name");
        fs::remove_file(&elsewhere).unwrap();
        assert_eq!(read(&path), Ok(Some(b"old".to_vec())));
        for mode in [0o666, 0o602, 0o620] {
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
            assert!(is_refused(&path), "others may write: {mode:o}");
        }
        fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
        symlink(&data, folder.0.join("link")).unwrap();
        assert!(is_refused(&folder.0.join("link/file")), "a link on the way");
        assert!(is_refused(&folder.0.join("link/deeper/file")), "a link on the way to nothing");
        assert!(is_refused(&data), "a folder");
        assert_eq!(read(&path), Ok(Some(b"old".to_vec())));
        write(&path, b"new").unwrap();
        assert_eq!((read(&path), read(&data.join("none"))), (Ok(Some(b"new".to_vec())), Ok(None)));
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(fs::read_dir(&data).unwrap().count(), 1, "nothing is left behind");
    }

    #[test]
    fn a_file_that_is_being_replaced_is_read_all_the_same() {
        let folder = Folder::new();
        let path = folder.0.join("file");
        write(&path, b"x").unwrap();
        std::thread::scope(|scope| {
            let writing = scope.spawn(|| (0..500).for_each(|_| write(&path, b"x").unwrap()));
            while !writing.is_finished() {
                assert_eq!(read(&path), Ok(Some(b"x".to_vec())));
            }
        });
    }

    #[test]
    fn a_file_is_read_up_to_its_limit() {
        let folder = Folder::new();
        let path = folder.0.join("file");
        for (bytes, is_read) in [(MAX_BYTES, true), (MAX_BYTES + 1, false)] {
            fs::write(&path, vec![b'x'; bytes as usize]).unwrap();
            assert_eq!(read(&path).is_ok(), is_read);
        }
    }
}
