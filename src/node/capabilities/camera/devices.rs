//! The cameras that the system knows.
//!
//! Linux tells of them in files: sysfs names the devices, and udev what each of them can do. Windows tells ffmpeg,
//! which prints what it hears.

use tokio_util::sync::CancellationToken;

use crate::node::capabilities::media::Failure;
use crate::node::capabilities::media::ffmpeg::Source;

/// A camera.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Device {
    /// What callers name it by.
    pub id: String,
    /// What people call it.
    pub name: String,
    /// What ffmpeg is to read for pictures.
    pub video: Source,
    /// What ffmpeg is to read for sound.
    pub audio: Option<Source>,
}

impl Device {
    /// What ffmpeg is to read for one picture that is about so wide.
    pub(super) fn still(&self, width: u32) -> Source {
        let video = self.video.clone();
        // Left alone, many cameras give a quarter of what they can. Linux takes the nearest size that there is; others
        // refuse what is not exactly right.
        if video.format == "v4l2" {
            video.with("video_size", format_args!("{width}x{}", width * 9 / 16))
        } else {
            video
        }
    }
}

/// Whether the system has a way to tell.
pub(super) fn are_known() -> bool {
    cfg!(target_os = "linux") || (cfg!(windows) && crate::node::capabilities::media::ffmpeg::find().is_some())
}

/// The cameras, the default one first.
#[cfg(target_os = "linux")]
pub(super) async fn known(_: &CancellationToken) -> Result<Vec<Device>, Failure> {
    use std::path::Path;
    let read = || linux::devices_in(Path::new("/sys/class/video4linux"), Path::new("/run/udev/data"));
    tokio::task::spawn_blocking(read).await.map_err(Failure::other)
}

/// The cameras, the default one first.
#[cfg(windows)]
pub(super) async fn known(cancel: &CancellationToken) -> Result<Vec<Device>, Failure> {
    use crate::node::capabilities::media::ffmpeg;
    let Some(ffmpeg) = ffmpeg::find() else { return Ok(Vec::new()) };
    Ok(directshow::devices_in(&ffmpeg::directshow_devices(&ffmpeg, cancel).await?))
}

/// The cameras, the default one first.
#[cfg(not(any(target_os = "linux", windows)))]
pub(super) async fn known(_: &CancellationToken) -> Result<Vec<Device>, Failure> {
    Ok(Vec::new())
}

#[cfg(target_os = "linux")]
mod linux {
    use std::path::Path;

    use super::Device;
    use crate::node::capabilities::media::ffmpeg::{Source, sound_server};

    /// The devices of a folder of sysfs that give pictures. A webcam has a second device for its metadata, and video
    /// decoders are devices, too. udev knows what each can do; where it does not run, the first device of each piece
    /// of hardware counts.
    pub(super) fn devices_in(sysfs: &Path, udev: &Path) -> Vec<Device> {
        let entries = std::fs::read_dir(sysfs).into_iter().flatten().flatten();
        let mut devices: Vec<(u32, Device)> = entries
            .filter_map(|entry| {
                let node = entry.file_name().into_string().ok()?;
                let number = node.strip_prefix("video")?.parse().ok()?;
                let read = |name: &str| std::fs::read_to_string(entry.path().join(name)).unwrap_or_default();
                let known = std::fs::read_to_string(udev.join(format!("c{}", read("dev").trim()))).ok();
                let capabilities = known
                    .as_deref()
                    .and_then(|known| known.lines().find_map(|l| l.strip_prefix("E:ID_V4L_CAPABILITIES=")));
                let gives_pictures = match capabilities {
                    Some(capabilities) => capabilities.split(':').any(|capability| capability == "capture"),
                    None => read("index").trim() == "0",
                };
                let (name, path) = (read("name").trim().to_owned(), format!("/dev/{node}"));
                let (video, audio) = (Source::new("v4l2", &path), sound_server("default"));
                gives_pictures.then_some((number, Device { id: path, name, video, audio }))
            })
            .collect();
        devices.sort_by_key(|(number, _)| *number);
        devices.into_iter().map(|(_, device)| device).collect()
    }

    #[cfg(test)]
    mod tests {
        use super::*;
        use crate::node::capabilities::media::scratch::Scratch;

        #[test]
        fn only_devices_that_give_pictures_are_cameras() {
            let scratch = Scratch::new().unwrap();
            let (sysfs, udev) = (scratch.path().join("sysfs"), scratch.path().join("udev"));
            assert_eq!(devices_in(&sysfs, &udev), []);
            std::fs::create_dir(&udev).unwrap();
            for (node, name, index, dev, capabilities) in [
                ("video10", "Late", "0", "81:9", None),
                ("video0", "Integrated Camera: HD", "0", "81:0", Some(":capture:")),
                ("video1", "Integrated Camera: HD", "1", "81:1", Some(":")),
                ("video2", "decoder", "0", "81:2", Some(":")),
                ("video3", "Second stream", "1", "81:3", Some(":video_output:capture:")),
                ("video4", "Metadata", "1", "81:4", None),
                ("vbi0", "Teletext", "0", "81:5", None),
            ] {
                std::fs::create_dir_all(sysfs.join(node)).unwrap();
                for (file, text) in [("name", name), ("index", index), ("dev", dev)] {
                    std::fs::write(sysfs.join(node).join(file), format!("{text}\n")).unwrap();
                }
                if let Some(capabilities) = capabilities {
                    let text = format!("S:v4l/by-id/x\nE:ID_V4L_VERSION=2\nE:ID_V4L_CAPABILITIES={capabilities}\n");
                    std::fs::write(udev.join(format!("c{dev}")), text).unwrap();
                }
            }
            let devices = devices_in(&sysfs, &udev);
            let found: Vec<_> = devices.iter().map(|device| (&*device.id, &*device.name)).collect();
            let expected =
                [("/dev/video0", "Integrated Camera: HD"), ("/dev/video3", "Second stream"), ("/dev/video10", "Late")];
            assert_eq!(found, expected);
            assert_eq!(devices[0].video, Source::new("v4l2", "/dev/video0"));
            assert_eq!(devices[0].still(1280).options, [("video_size".to_owned(), "1280x720".to_owned())]);
        }
    }
}

#[cfg(any(windows, test))]
mod directshow {
    use super::Device;
    use crate::node::capabilities::media::ffmpeg::Source;

    #[derive(Clone, Copy, PartialEq, Eq)]
    enum Kind {
        Camera,
        Microphone,
        Other,
    }

    struct Listed {
        kind: Kind,
        id: String,
        name: String,
    }

    /// The cameras in what ffmpeg prints about DirectShow's devices. The first microphone is every camera's.
    pub(super) fn devices_in(listing: &str) -> Vec<Device> {
        let (mut devices, mut heading) = (Vec::<Listed>::new(), Kind::Camera);
        for line in listing.lines() {
            // Up to version 4 each kind has a heading; since then each device tells its kind after its name.
            if line.contains("DirectShow audio devices") {
                heading = Kind::Microphone;
            }
            let Some((before, rest)) = line.split_once('"') else { continue };
            let Some((name, after)) = rest.rsplit_once('"') else { continue };
            if before.contains("Alternative name") {
                // It is unique, and has no colon, with which ffmpeg would take a microphone's name to begin.
                if let Some(device) = devices.last_mut() {
                    name.clone_into(&mut device.id);
                }
                continue;
            }
            let kind = match after {
                kind if kind.contains("video") => Kind::Camera,
                kind if kind.contains("audio") => Kind::Microphone,
                kind if kind.contains("none") => Kind::Other,
                _ => heading,
            };
            devices.push(Listed { kind, id: name.to_owned(), name: name.to_owned() });
        }
        let microphone = devices.iter().find(|device| device.kind == Kind::Microphone);
        let audio = microphone.map(|device| Source::new("dshow", format!("audio={}", device.id)));
        let cameras = devices.into_iter().filter(|device| device.kind == Kind::Camera);
        let camera = |Listed { id, name, .. }| {
            let video = Source::new("dshow", format!("video={id}"));
            Device { id, name, video, audio: audio.clone() }
        };
        cameras.map(camera).collect()
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        #[test]
        fn cameras_and_microphones_are_told_apart_in_old_and_new_listings() {
            let new = r#"[dshow @ 000001] "Integrated Camera" (video)
[dshow @ 000001]   Alternative name "@device_pnp_\\?\usb#vid_04f2&pid_b604#{65e8773d}\global"
[dshow @ 000001] "OBS Virtual Camera" (none)
[dshow @ 000001]   Alternative name "@device_sw_{860BB310}\{A3FCE0F5}"
[dshow @ 000001] "Second "HD" Camera" (video)
[dshow @ 000001] "Microphone (Realtek)" (audio)
[dshow @ 000001]   Alternative name "@device_cm_{33D9A762}\wave_{F1}"
dummy: Immediate exit requested
"#;
            let devices = devices_in(new);
            let found: Vec<_> = devices.iter().map(|device| (&*device.id, &*device.name)).collect();
            let pnp = r"@device_pnp_\\?\usb#vid_04f2&pid_b604#{65e8773d}\global";
            assert_eq!(found, [(pnp, "Integrated Camera"), (r#"Second "HD" Camera"#, r#"Second "HD" Camera"#)]);
            assert_eq!(devices[0].video, Source::new("dshow", format!("video={pnp}")));
            assert_eq!(devices[1].audio, Some(Source::new("dshow", r"audio=@device_cm_{33D9A762}\wave_{F1}")));

            let old = r#"[dshow @ 01] DirectShow video devices (some may be both video and audio devices)
[dshow @ 01]  "USB Camera"
[dshow @ 01]     Alternative name "@device_pnp_1"
[dshow @ 01] DirectShow audio devices
[dshow @ 01]  "Mic"
[dshow @ 01]     Alternative name "@device_cm_1"
"#;
            let devices = devices_in(old);
            assert_eq!(devices.len(), 1);
            assert_eq!((&*devices[0].id, &*devices[0].name), ("@device_pnp_1", "USB Camera"));
            assert_eq!(devices[0].audio, Some(Source::new("dshow", "audio=@device_cm_1")));
            assert_eq!(devices_in("[dshow @ 01] Could not enumerate video devices\n"), []);
        }
    }
}
