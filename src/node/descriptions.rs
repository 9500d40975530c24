//! What MCP clients read about each command. The node's manual for agents, `skill.md`, has a section for each; a
//! test fails if the capabilities, this table and the manual are not about the same commands.

/// The manual for agents that use `winnode`.
pub const MANUAL: &str = include_str!("skill.md");

/// Each command with its description.
pub const DESCRIPTIONS: &[(&str, &str)] = &[
    ("system.notify", "Show a desktop notification on this node."),
    ("system.which", "Look program names up on this node's PATH; names that are not found are left out."),
    (
        "system.run",
        "Run one program with the given arguments, without a shell, if this node's owner permits it. A program that \
         fails, or takes too long, is told in the result.",
    ),
    ("system.run.prepare", "Check a request for system.run and tell what would be run, without running it."),
    (
        "system.execApprovals.get",
        "Read the policy that says which programs system.run may start, and the hash that a change of it needs.",
    ),
    (
        "system.execApprovals.set",
        "Replace that policy, if the given hash is still that of the current one. It can only be made stricter.",
    ),
    ("device.info", "Fixed facts of the device: its name, model, operating system, app version and locale."),
    (
        "device.status",
        "Live health of the device by section: os, cpu, memory, disk, battery; also storage, network and uptime.",
    ),
    ("app.status", "Summary of this node: its bridge, its local MCP server, its version."),
    ("app.settings.get", "One switch of this node's settings, or all of them."),
    ("app.connection.status", "State of the bridge and of the local MCP server, with what is wrong."),
    ("app.connection.reconnect", "Connect the bridge again now; calls go on."),
    ("canvas.present", "Show the user a web page or an HTML document in the canvas, a window on this node."),
    ("canvas.hide", "Take the canvas away from the user's eyes; what is in it stays."),
    ("canvas.navigate", "Show what is at an http or https address in the canvas."),
    ("canvas.eval", "Evaluate JavaScript in the canvas's page, and tell the result."),
    ("canvas.snapshot", "Take a picture of the canvas, as PNG or JPEG."),
    ("canvas.a2ui.push", "Show user interfaces in the canvas: A2UI 0.8 messages, one JSON object on each line."),
    ("canvas.a2ui.pushJSONL", "The same as canvas.a2ui.push."),
    ("canvas.a2ui.reset", "Remove all A2UI surfaces from the canvas."),
    ("canvas.a2ui.dump", "Tell the A2UI surfaces as they are, with what the user has entered and pressed."),
    ("canvas.caps", "Tell what this node's canvas can do."),
    ("screen.snapshot", "Take a still picture of one display of this node, as PNG or JPEG."),
    ("screen.record", "Record one display of this node for a given time, as an MP4 video."),
    ("camera.list", "List this node's cameras; the first one is the default."),
    ("camera.snap", "Take one photo with a camera of this node."),
    ("camera.clip", "Record a short MP4 video with a camera of this node, with sound if it has a microphone."),
    ("location.get", "Where this device is: latitude, longitude, accuracy in metres, and when it was there."),
    ("browser.proxy", "Send one HTTP request to the browser-control host on this machine and return its JSON."),
    ("tts.speak", "Speak a text aloud on this node; the answer comes when it has been spoken."),
    ("tts.status", "Which speech providers of this node are ready, and which one speaks by default."),
    ("stt.transcribe", "Record this node's microphone for a fixed time and transcribe it, all on this machine."),
    ("stt.listen", "Listen to this node's microphone until speech has ended, and transcribe it on this machine."),
    ("stt.status", "Which speech recognition engine this node has, and whether it is ready."),
];

/// The description of a command that is known here.
pub fn describe(command: &str) -> Option<&'static str> {
    DESCRIPTIONS.iter().find(|(name, _)| *name == command).map(|(_, description)| *description)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;
    use std::path::Path;
    use std::sync::Arc;

    use crate::node::capabilities::Capability;
    use crate::node::{Setup, settings};

    /// Those of a node on which everything is switched on, and whose folder is not used.
    fn capabilities() -> Vec<Arc<dyn Capability>> {
        let mut setup = Setup::in_folder(Path::new("/no/such/folder"));
        for (name, _) in settings::CAPABILITIES {
            setup.settings.set(name, true).unwrap();
        }
        crate::node::registry(setup).local()
    }

    #[test]
    fn capabilities_descriptions_and_manual_are_about_the_same_commands() {
        let capabilities = capabilities();
        let commands: Vec<&str> = capabilities.iter().flat_map(|capability| capability.commands()).collect();
        let described: Vec<&str> = DESCRIPTIONS.iter().map(|(name, _)| *name).collect();
        let headings: Vec<&str> = MANUAL.lines().filter_map(|line| line.strip_prefix("### ")).collect();
        let set = |names: &[&'static str]| names.iter().copied().collect::<BTreeSet<_>>();
        let commands_set: BTreeSet<&str> = commands.iter().copied().collect();
        assert_eq!(commands_set, set(&described));
        assert_eq!(commands_set, set(&headings));
        // None twice.
        assert_eq!([commands.len(), described.len(), headings.len()], [commands_set.len(); 3]);
    }

    #[test]
    fn every_command_has_a_schema_that_older_callers_pass() {
        for capability in capabilities() {
            for command in capability.commands() {
                let schema = capability.input_schema(command).unwrap_or_else(|| panic!("{command} has no schema"));
                assert_eq!(
                    (&schema["type"], &schema["additionalProperties"]),
                    (&"object".into(), &true.into()),
                    "{command}"
                );
                assert!(schema["properties"].is_object(), "{command}");
            }
        }
    }
}
