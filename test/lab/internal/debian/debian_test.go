// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package debian

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestReadSources(t *testing.T) {
	dir := t.TempDir()
	require.NoError(t, os.Mkdir(filepath.Join(dir, "sources.list.d"), 0o755))
	write := func(name, text string) {
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644))
	}
	write("sources.list", `
# deb http://commented.example/debian bookworm main
deb-src http://source.example/debian bookworm main
deb [arch=amd64 signed-by=/keys/list.gpg] http://list.example/debian trixie main contrib # comment
deb http://short.example
`)
	write("sources.list.d/other.list", "deb http://other.example/repo bookworm extra\n")
	write("sources.list.d/debian.sources", `Types: deb deb-src
# http://snapshot.example
URIs: http://stanza.example/debian
Suites: bookworm bookworm-updates
Components: main
Signed-By: /keys/stanza.gpg

Types: deb
URIs: http://disabled.example/debian
Suites: sid
Components: main
Enabled: no
`)
	write("sources.list.d/ignored.txt", "deb http://ignored.example sid main\n")

	sources, err := readSources(dir)
	require.NoError(t, err)

	m, err := mirror(sources, "bookworm")
	require.NoError(t, err)
	require.Equal(t, []string{"http://stanza.example/debian"}, m.uris)
	require.Equal(t, "deb [signed-by=/keys/stanza.gpg] http://stanza.example/debian bookworm-backports main\n", m.list("bookworm-backports"))

	m, err = mirror(sources, "trixie")
	require.NoError(t, err)
	require.Equal(t, []string{"http://list.example/debian"}, m.uris)
	require.Equal(t, "/keys/list.gpg", m.signedBy)

	_, err = mirror(sources, "sid")
	require.ErrorContains(t, err, "sid")
}

func TestMirrorWithoutKeyring(t *testing.T) {
	m := source{uris: []string{"http://a.example/debian"}}
	require.Equal(t,
		"deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://a.example/debian a main\n"+
			"deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://a.example/debian b main\n",
		m.list("a", "b"))
}

func TestParseSimulation(t *testing.T) {
	require.Equal(t, []string{"zlib1g=1:1.2.13.dfsg-1", "libc6=2.36-9"}, parseSimulation(`Reading package lists...
Inst zlib1g (1:1.2.13.dfsg-1 Debian:12.11/oldstable [amd64])
Inst libc6 (2.36-9 Debian:12.11/oldstable [amd64]) []
Conf libc6 (2.36-9 Debian:12.11/oldstable [amd64])
`))
}

func TestOSRelease(t *testing.T) {
	text := "PRETTY_NAME=\"Debian GNU/Linux 12 (bookworm)\"\nVERSION_CODENAME=bookworm\nID=\"debian\"\n"
	require.Equal(t, "bookworm", osRelease(text, "VERSION_CODENAME"))
	require.Equal(t, "debian", osRelease(text, "ID"))
	require.Empty(t, osRelease(text, "MISSING"))
}
