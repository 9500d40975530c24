//! Files that only their owner may read, written whole or not at all.

use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Read, Write};
use std::path::{Path, PathBuf};

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;

/// The text of a file; `None` if there is none.
///
/// # Errors
/// If it cannot be read, is no file (reading a pipe could take for ever), or is longer than `limit` bytes.
pub fn read(path: &Path, limit: u64) -> io::Result<Option<String>> {
    let unfit = |why: String| Err(io::Error::new(ErrorKind::InvalidData, why));
    match fs::metadata(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
        Ok(about) if !about.is_file() => return unfit("it is not a file".to_owned()),
        Ok(about) if about.len() > limit => {
            return unfit(format!("it has {} bytes; the limit is {limit}", about.len()));
        }
        Ok(_) => {}
    }
    let mut text = String::new();
    File::open(path)?.take(limit).read_to_string(&mut text)?;
    Ok(Some(text))
}

/// Puts `content` in place of the file. Its folder is made if it is missing.
///
/// # Errors
/// If that cannot be done; then the file is as it was.
pub fn write(path: &Path, content: &[u8]) -> io::Result<()> {
    put(&stage(path, content)?, path)
}

/// Writes a file beside `path` that is to take its place or its name.
///
/// # Errors
/// If it cannot be written.
pub fn stage(path: &Path, content: &[u8]) -> io::Result<PathBuf> {
    let missing = || io::Error::new(ErrorKind::InvalidInput, "the path must name a file in a folder");
    let (folder, name) = (path.parent().ok_or_else(missing)?, path.file_name().ok_or_else(missing)?);
    if !folder.as_os_str().is_empty() {
        make_folder(folder)?;
    }
    let mut staged_name = OsString::from(".");
    staged_name.push(name);
    staged_name.push(format!(".{}.tmp", random::<9>()?));
    let staged = folder.join(staged_name);
    let mut options = OpenOptions::new();
    options.write(true).create_new(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    let mut file = options.open(&staged)?;
    let written = file.write_all(content).and_then(|()| file.sync_all());
    written.inspect_err(|_| clean_up(&staged))?;
    Ok(staged)
}

/// Puts a staged file in the place of another.
///
/// # Errors
/// If that cannot be done; the staged file is removed.
pub fn put(staged: &Path, path: &Path) -> io::Result<()> {
    fs::rename(staged, path).inspect_err(|_| clean_up(staged))
}

/// Removes a staged file.
pub fn clean_up(staged: &Path) {
    if let Err(error) = fs::remove_file(staged) {
        tracing::warn!(%error, file = %staged.display(), "a temporary file is left behind");
    }
}

/// A folder that is made is its owner's alone. One that is there already may be meant for others, too.
///
/// # Errors
/// If it cannot be made.
pub fn make_folder(folder: &Path) -> io::Result<()> {
    let mut builder = fs::DirBuilder::new();
    builder.recursive(true);
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    builder.create(folder)
}

/// Random bytes as URL-safe Base64.
///
/// # Errors
/// If the operating system has none.
pub fn random<const N: usize>() -> io::Result<String> {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes).map_err(io::Error::other)?;
    Ok(URL_SAFE_NO_PAD.encode(bytes))
}
