// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package docs

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/containernetworking/cni/libcni"
	"github.com/stretchr/testify/require"
	"sigs.k8s.io/yaml"
)

// root is the repository's.
const root = "../.."

// repository makes one with nothing but pages: README.md and the least of the others.
func repository(t *testing.T, readme string) string {
	t.Helper()
	dir := t.TempDir()
	for file, content := range map[string]string{
		"README.md": readme, "Documentation/index.md": "", "examples/README.md": "", "test/lab/README.md": "",
	} {
		path := filepath.Join(dir, file)
		require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o755))
		require.NoError(t, os.WriteFile(path, []byte(content), 0o644))
	}
	return dir
}

func TestBlocks(t *testing.T) {
	blocks, err := Blocks(repository(t, "# A\n\n```sh node\nls\n\n    ls -l\n```\n\n1. In a list:\n\n   ```yaml\n   a: 1\n   ```\n\n~~~~\n```\n~~~~\n\n```text\n```\n"))
	require.NoError(t, err)
	require.Equal(t, []Block{
		{File: "README.md", Line: 3, Lang: "sh", Mark: "node", Text: "ls\n\n    ls -l\n"},
		{File: "README.md", Line: 11, Lang: "yaml", Text: "a: 1\n"},
		{File: "README.md", Line: 15, Text: "```\n"},
		{File: "README.md", Line: 19, Lang: "text"},
	}, blocks)

	_, err = Blocks(repository(t, "# A\n\n    make\n"))
	require.EqualError(t, err, "README.md:3: a block without fences and language")
	_, err = Blocks(repository(t, "# A\n\n~~~text\n```\n"))
	require.EqualError(t, err, "README.md:3: a block that does not end")
	_, err = Blocks(t.TempDir())
	require.ErrorContains(t, err, "no page *.md")
}

// TestMarks says that a reader and a test know of each block what it is.
func TestMarks(t *testing.T) {
	blocks, err := Blocks(root)
	require.NoError(t, err)
	require.NotEmpty(t, blocks)
	for _, b := range blocks {
		known, ok := marks[b.Lang]
		if !ok {
			t.Errorf("%s: the block's language %q is none of these: %v", b, b.Lang, marks)
			continue
		}
		require.Contains(t, known, b.Mark, "%s: the mark of a block in %s", b, b.Lang)
		if b.Mark == OwnCluster {
			data, err := os.ReadFile(filepath.Join(root, b.File))
			require.NoError(t, err)
			lines := strings.Split(string(data), "\n")
			require.Contains(t, strings.Join(lines[max(0, b.Line-6):b.Line], " "), "your own", "%s: the text above says what it needs", b)
		}
	}
}

// TestShell says that a shell can read what users copy into one.
func TestShell(t *testing.T) {
	blocks, err := Blocks(root)
	require.NoError(t, err)
	for _, b := range blocks {
		if b.Lang != Shell {
			continue
		}
		out, err := exec.CommandContext(t.Context(), "bash", "-n", "-c", b.Text).CombinedOutput()
		require.NoError(t, err, "%s: %s", b, out)
		require.NotContains(t, b.Text, "<", "%s: a placeholder, or input that a reader has to make", b)
	}
}

// TestNetworks says that a CNI runtime can read the networks of the NADs, which no API server here knows.
func TestNetworks(t *testing.T) {
	data, err := os.ReadFile(filepath.Join(root, "examples", "nad-amd-host-device.yaml"))
	require.NoError(t, err)
	objects := strings.Split(string(data), "\n---\n")
	blocks, err := Blocks(root)
	require.NoError(t, err)
	for _, b := range blocks {
		if b.Lang == YAML {
			objects = append(objects, b.Text)
		}
	}
	seen := 0
	for _, object := range objects {
		if !strings.Contains(object, "kind: NetworkAttachmentDefinition") {
			continue
		}
		var nad struct {
			Metadata struct{ Name string }
			Spec     struct{ Config string }
		}
		require.NoError(t, yaml.Unmarshal([]byte(object), &nad), object)
		network, err := libcni.NetworkConfFromBytes([]byte(nad.Spec.Config))
		require.NoError(t, err, object)
		require.Equal(t, nad.Metadata.Name, network.Name, "the NAD and its network")
		require.Equal(t, "amd-host-device", network.Plugins[0].Network.Type, "Multus gives the device's address to the first plugin")
		seen++
	}
	require.Equal(t, 5, seen)
}
