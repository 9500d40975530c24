//! Opening files that operators name. A path may lead to a pipe or a device, which would make whoever opens it wait
//! for ever: those are refused instead.

use std::fs::{File, Metadata, OpenOptions};
use std::io::{self, Read};
use std::path::Path;

/// The largest file that is read as a whole.
const MAX_BYTES: u64 = 64 * 1024 * 1024;

/// Reads a regular file as text.
///
/// # Errors
/// If it is none, is too large, is no UTF-8, or cannot be read.
pub fn read(path: &Path) -> io::Result<String> {
    let file = open_regular(path, OpenOptions::new().read(true))?;
    let mut text = String::new();
    if file.take(MAX_BYTES + 1).read_to_string(&mut text)? as u64 > MAX_BYTES {
        return Err(io::Error::other(format!("it is larger than {MAX_BYTES} bytes")));
    }
    Ok(text)
}

/// Opens a regular file as `options` say.
///
/// # Errors
/// If it is anything else, or cannot be opened.
pub fn open_regular(path: &Path, options: &mut OpenOptions) -> io::Result<File> {
    open(path, options, |metadata| match metadata.is_file() {
        true => Ok(()),
        false => Err(io::Error::other("it is no regular file")),
    })
}

/// Opens a regular file to append to it, or makes it, for its owner alone. A character device (`/dev/null`, a
/// terminal) does as well: writing to it either succeeds at once or fails at once.
///
/// # Errors
/// If it is anything else, or cannot be opened.
pub fn append(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.append(true).create(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    open(path, &mut options, |metadata| match metadata.is_file() || is_device(metadata) {
        true => Ok(()),
        false => Err(io::Error::other("it is neither a regular file nor a character device")),
    })
}

/// Asks twice what it is: opening some things is an error that says nothing, and others may take their place.
fn open(path: &Path, options: &mut OpenOptions, check: impl Fn(&Metadata) -> io::Result<()>) -> io::Result<File> {
    if let Ok(metadata) = std::fs::metadata(path) {
        check(&metadata)?;
    }
    #[cfg(unix)]
    {
        use rustix::fs::OFlags;
        // Neither wait for the other end of a pipe, nor let a terminal take the process over.
        let flags = OFlags::NONBLOCK | OFlags::NOCTTY;
        std::os::unix::fs::OpenOptionsExt::custom_flags(options, flags.bits().cast_signed());
    }
    let file = options.open(path)?;
    check(&file.metadata()?)?;
    Ok(file)
}

#[cfg(unix)]
fn is_device(metadata: &Metadata) -> bool {
    std::os::unix::fs::FileTypeExt::is_char_device(&metadata.file_type())
}

#[cfg(not(unix))]
fn is_device(_: &Metadata) -> bool {
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg(unix)]
    #[test]
    fn what_could_make_its_reader_or_writer_wait_is_refused() {
        let folder = std::env::temp_dir().join(format!("openclaw-file-{}", uuid::Uuid::new_v4()));
        std::fs::create_dir(&folder).unwrap();
        let pipe = folder.join("pipe");
        assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        let socket = folder.join("socket");
        let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        for path in [&pipe, &socket, &folder] {
            let says = |error: io::Error| error.to_string();
            assert_eq!(read(path).map_err(says), Err("it is no regular file".into()), "{path:?}");
            let appended = append(path).map(|_| ()).map_err(says);
            assert_eq!(appended, Err("it is neither a regular file nor a character device".into()), "{path:?}");
        }
        assert!(read(Path::new("/dev/null")).is_err() && append(Path::new("/dev/null")).is_ok());
        let file = folder.join("file");
        assert_eq!(read(&file).unwrap_err().kind(), io::ErrorKind::NotFound);
        io::Write::write_all(&mut append(&file).unwrap(), b"text").unwrap();
        assert_eq!(read(&file).unwrap(), "text");
        std::fs::remove_dir_all(folder).unwrap();
    }
}
