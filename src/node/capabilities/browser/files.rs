//! The files that a reply names, read only inside one folder.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use serde_json::Value;

/// The most bytes of a file.
const MAX_FILE: u64 = 10 * 1024 * 1024;
/// Where a reply names files.
const POINTERS: [&str; 3] = ["/path", "/imagePath", "/download/path"];

/// A file as it is handed on.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Named {
    /// As the reply has it.
    pub(super) path: String,
    pub(super) mime_type: &'static str,
    pub(super) base64: String,
}

/// Reads what `reply` names. What is outside of `folder`, too large or not to be read is left out.
pub(super) async fn read(reply: &Value, folder: &Path) -> Vec<Named> {
    let mut paths: Vec<String> = Vec::new();
    for path in POINTERS.into_iter().filter_map(|pointer| reply.pointer(pointer)?.as_str()) {
        if !paths.iter().any(|known| known == path) {
            paths.push(path.to_owned());
        }
    }
    let folder = folder.to_owned();
    let read = move || paths.into_iter().filter_map(|path| read_one(path, &folder)).collect();
    tokio::task::spawn_blocking(read).await.unwrap_or_default()
}

fn read_one(path: String, folder: &Path) -> Option<Named> {
    let Some(file) = inside(folder, Path::new(&path)) else {
        tracing::warn!("the browser-control host names a file that is not in its folder");
        return None;
    };
    let mut bytes = Vec::new();
    File::open(&file).ok()?.take(MAX_FILE + 1).read_to_end(&mut bytes).ok()?;
    if u64::try_from(bytes.len()).ok()? > MAX_FILE {
        tracing::warn!(limit = MAX_FILE, "the browser-control host names a file that is too large");
        return None;
    }
    Some(Named { mime_type: mime_type(&file), base64: BASE64_STANDARD.encode(bytes), path })
}

/// Where a file really is, if that is inside of `folder`.
fn inside(folder: &Path, path: &Path) -> Option<PathBuf> {
    let folder = folder.canonicalize().ok()?;
    let file = folder.join(path).canonicalize().ok()?;
    (file.starts_with(&folder) && file.is_file()).then_some(file)
}

fn mime_type(path: &Path) -> &'static str {
    let extension = path.extension().and_then(|extension| extension.to_str()).unwrap_or_default();
    match &*extension.to_ascii_lowercase() {
        "png" => "image/png",
        "jpg" | "jpeg" => "image/jpeg",
        "gif" => "image/gif",
        "webp" => "image/webp",
        "pdf" => "application/pdf",
        "json" => "application/json",
        "html" | "htm" => "text/html",
        "txt" | "log" => "text/plain",
        "csv" => "text/csv",
        "zip" => "application/zip",
        _ => "application/octet-stream",
    }
}
