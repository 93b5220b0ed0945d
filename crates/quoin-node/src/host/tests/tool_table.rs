//! Every tool of a file system, each of its exit codes, and its death: what a call says then, and that nothing of it
//! stays in the way of the next one.

use super::*;
use crate::tools::Tool;

/// End of a tool, as a line of a shell after `run`, which is the tool itself.
const ENDS: [(&str, End); 15] = [
    ("run", End::Code(0)),
    ("run; exit 1", End::Code(1)),
    ("run; exit 2", End::Code(2)),
    ("run; exit 3", End::Code(3)),
    ("run; exit 4", End::Code(4)),
    ("exit 4", End::Code(4)),
    ("exit 5", End::Code(5)),
    ("exit 8", End::Code(8)),
    ("exit 16", End::Code(16)),
    ("exit 32", End::Code(32)),
    ("exit 127", End::Code(127)),
    ("exit 128", End::Code(128)),
    ("exit 255", End::Code(255)),
    ("kill -9 $$", End::Killed),
    ("run; kill -9 $$", End::Killed),
];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    Code(u8),
    Killed,
}

/// Outcome of a call whose tool ends so.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Outcome {
    Success,
    /// A person has to decide.
    Damaged,
    Failure,
}

/// One tool, and the call that runs it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Row {
    CheckExt4,
    MakeExt4,
    MakeXfs,
    GrowUnmountedExt4,
    GrowMountedXfs,
}

impl Row {
    fn tool(self) -> Tool {
        match self {
            Self::CheckExt4 => crate::tools::E2FSCK,
            Self::MakeExt4 => crate::tools::MKFS_EXT4,
            Self::MakeXfs => crate::tools::MKFS_XFS,
            Self::GrowUnmountedExt4 => crate::tools::RESIZE2FS,
            Self::GrowMountedXfs => crate::tools::XFS_GROWFS,
        }
    }

    fn is_xfs(self) -> bool {
        matches!(self, Self::MakeXfs | Self::GrowMountedXfs)
    }

    /// The model, by the manual page of each tool: the code of e2fsck is a sum.
    fn outcome(self, end: End) -> Outcome {
        match (self, end) {
            (_, End::Code(0)) | (Self::CheckExt4, End::Code(1..=3)) => Outcome::Success,
            (Self::CheckExt4, End::Code(4..=7)) => Outcome::Damaged,
            _ => Outcome::Failure,
        }
    }

    /// Ends that are tried; the codes of other tools than e2fsck mean nothing but failure.
    fn ends(self) -> impl Iterator<Item = (&'static str, End)> {
        let all = self == Self::CheckExt4;
        ENDS.into_iter()
            .filter(move |(_, end)| all || matches!(end, End::Code(0 | 1 | 32) | End::Killed))
    }
}

/// Makes a directory with one tool that ends so. Another process writes it: a file that is open for writing
/// cannot be executed.
fn tools_with(world: &World, tool: Tool, end: &str) -> Tools {
    let directory = world.path("tools");
    let _ = fs::remove_dir_all(&directory);
    fs::create_dir(&directory).unwrap();
    let real = Tools::of_host().find(tool).unwrap();
    let ends = end.replace("run", "run \"$@\"");
    let script = format!(
        "#!/bin/sh\nrun() {{ {} \"$@\" >/dev/null 2>&1; }}\necho the reason >&2\n{ends}\n",
        real.display()
    );
    let path = directory.join(tool.name);
    let write = "cat >\"$0\" && chmod 755 \"$0\"";
    let mut child = Command::new("sh")
        .args(["-c", write])
        .arg(&path)
        .stdin(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    std::io::Write::write_all(&mut child.stdin.take().unwrap(), script.as_bytes()).unwrap();
    assert!(child.wait().unwrap().success());
    let path = std::env::var_os("PATH").unwrap_or_default();
    let mut directories = vec![directory];
    directories.extend(std::env::split_paths(&path));
    directories.extend(["/usr/sbin", "/sbin"].map(PathBuf::from));
    Tools::within(directories)
}

#[tokio::test]
async fn each_end_of_each_tool_is_told_for_what_it_is_and_stays_in_no_ones_way() {
    let Some(world) = World::new() else { return };
    let rows =
        [Row::CheckExt4, Row::MakeExt4, Row::MakeXfs, Row::GrowUnmountedExt4, Row::GrowMountedXfs];
    let file = world.attacher.file(VOLUME);
    for row in rows {
        let (size_bytes, growth) =
            if row.is_xfs() { (320 * MIB, 100 * MIB) } else { (64 * MIB, 32 * MIB) };
        let file_system = if row.is_xfs() { FileSystem::Xfs } else { FileSystem::Ext4 };
        let access = Access::Mount { file_system, flags: Vec::new() };
        let stage = StageRequest { size_bytes, ..world.stage_request(access) };
        let larger = StageRequest { size_bytes: size_bytes + growth, ..stage.clone() };
        for (line, end) in row.ends() {
            let what = format!("{row:?}: {line}");
            let _ = fs::remove_file(&file);
            let makes = matches!(row, Row::MakeExt4 | Row::MakeXfs);
            if !makes {
                world.node().stage(&stage).await.unwrap();
                fs::write(world.path("stage/x"), "kept").unwrap();
                if row != Row::GrowMountedXfs {
                    world.unstage(&world.node()).await;
                }
            }
            let options = HostOptions {
                state_directory: world.path("state"),
                run_directory: world.path("run"),
                target_deadline_ms: 2000,
            };
            let tools = tools_with(&world, row.tool(), line);
            let node = NodeHost::with_tools(options, world.attacher.clone(), tools).unwrap();
            let call = async |node: &NodeHost| match row {
                Row::GrowUnmountedExt4 => {
                    world.attacher.resize(VOLUME, larger.size_bytes).await.unwrap();
                    node.stage(&larger).await
                }
                Row::GrowMountedXfs => {
                    let path = world.path("stage");
                    node.expand(VOLUME, &path, larger.size_bytes).await.map(drop)
                }
                _ => node.stage(&stage).await,
            };
            let outcome = call(&node).await;
            match row.outcome(end) {
                Outcome::Success => outcome.unwrap_or_else(|error| panic!("{what}: {error}")),
                expected => {
                    let error = outcome.err().unwrap_or_else(|| panic!("{what} is a success"));
                    let is_damage = matches!(error, Error::Damaged { .. });
                    assert_eq!(is_damage, expected == Outcome::Damaged, "{what}: {error}");
                    let text = error.to_string();
                    assert!(text.contains(row.tool().name) && text.contains("reason"), "{text}");
                    if row != Row::GrowMountedXfs {
                        world.assert_clean();
                    }
                }
            }
            // The next call, with tools that work.
            let node = world.node();
            call(&node).await.unwrap_or_else(|error| panic!("after {what}: {error}"));
            if !makes {
                assert_eq!(fs::read_to_string(world.path("stage/x")).unwrap(), "kept", "{what}");
            }
            let total = node.stats(VOLUME, &world.path("stage")).await.unwrap().total_bytes;
            if matches!(row, Row::GrowUnmountedExt4 | Row::GrowMountedXfs) {
                assert!(total > size_bytes, "{what}: {total}");
            }
            world.unstage(&node).await;
            world.assert_clean();
        }
    }
}
