//! The file of a push, which must be one of those for passing things on: in the system's temporary folder, no link.

use std::io::{self, Read};
use std::path::{Component, Path};

use super::a2ui;

/// Reads a file. Of one that is too large, so much is read that this shows.
pub(super) async fn read(path: String) -> io::Result<String> {
    let read = tokio::task::spawn_blocking(move || read_in(&std::env::temp_dir(), Path::new(&path)));
    read.await.map_err(io::Error::other)?
}

fn read_in(root: &Path, path: &Path) -> io::Result<String> {
    let refused = |why| Err(io::Error::new(io::ErrorKind::PermissionDenied, why));
    let real_root = root.canonicalize()?;
    let below = path.strip_prefix(root).or_else(|_| path.strip_prefix(&real_root));
    let Ok(below) = below else { return refused("it is not in the temporary folder") };
    if below.components().any(|part| !matches!(part, Component::Normal(_))) {
        return refused("its path leads upwards");
    }
    let path = path.canonicalize()?;
    if path != real_root.join(below) {
        return refused("there is a link in its path");
    }
    // Opening anything else than a file may never end.
    if !path.metadata()?.is_file() {
        return refused("it is no file");
    }
    let mut text = String::new();
    std::fs::File::open(path)?.take(a2ui::MAX_PUSH_BYTES as u64 + 1).read_to_string(&mut text)?;
    Ok(text)
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    #[test]
    fn only_real_files_of_the_temporary_folder_are_read() {
        let base = std::env::temp_dir().join(format!("openclaw-jsonl-{}", uuid::Uuid::new_v4().simple()));
        let root = base.join("tmp");
        std::fs::create_dir_all(root.join("folder")).unwrap();
        std::fs::write(root.join("folder/a.jsonl"), "{}").unwrap();
        std::fs::write(base.join("secret"), "secret").unwrap();
        symlink(base.join("secret"), root.join("out")).unwrap();
        symlink(root.join("folder/a.jsonl"), root.join("in")).unwrap();
        symlink(root.join("folder"), root.join("folder-link")).unwrap();
        symlink(&root, base.join("tmp-link")).unwrap();
        std::fs::write(root.join("large"), vec![b' '; a2ui::MAX_PUSH_BYTES + 5]).unwrap();
        let read = |path: &str| read_in(&root, &base.join(path));
        assert_eq!(read("tmp/folder/a.jsonl").unwrap(), "{}");
        assert_eq!(read("tmp/large").unwrap().len(), a2ui::MAX_PUSH_BYTES + 1);
        for path in
            ["secret", "tmp/../secret", "tmp/folder/../../secret", "tmp/out", "tmp/in", "tmp/folder-link/a.jsonl"]
        {
            assert!(read(path).is_err(), "{path}");
        }
        for path in ["tmp", "tmp/folder", "tmp/missing", "tmp-link/folder/a.jsonl"] {
            assert!(read(path).is_err(), "{path}");
        }
        assert!(read_in(&root, Path::new("folder/a.jsonl")).is_err(), "a relative path");
        // The folder itself may be reached by a link.
        let linked = base.join("tmp-link");
        assert_eq!(read_in(&linked, &linked.join("folder/a.jsonl")).unwrap(), "{}");
        assert!(read_in(&linked, &linked.join("in")).is_err());
        std::fs::remove_dir_all(base).unwrap();
    }
}
