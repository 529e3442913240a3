// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package bugreport

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"io"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/cilium/networkdriver/internal/testenv"
	"github.com/cilium/networkdriver/pkg/debugapi"
	"github.com/cilium/networkdriver/pkg/health"
)

// agent is an agent that answers, or not.
type agent struct {
	err    error
	config map[string]string
	log    string
	dump   string
}

func (a *agent) Dump(context.Context) (json.RawMessage, error) { return json.RawMessage(a.dump), a.err }
func (a *agent) Devices(context.Context) ([]debugapi.Device, error) {
	return []debugapi.Device{{Device: "0000-03-00-1"}}, a.err
}
func (a *agent) Status(context.Context) (health.Status, error) {
	return health.Status{Live: true}, a.err
}
func (a *agent) Config(context.Context) (map[string]string, error) { return a.config, a.err }
func (a *agent) Version(context.Context) (string, error)           { return "v1.2.3", a.err }
func (a *agent) Log(context.Context) ([]byte, error)               { return []byte(a.log), a.err }

func links() ([]Link, error) { return []Link{{Index: 1, Name: "lo"}}, nil }

// report returns the files of a report in their order, and by name.
func report(t *testing.T, p Params) (names []string, files map[string]string, missing []string) {
	t.Helper()
	p.Now = time.Date(2026, 12, 1, 12, 0, 0, 0, time.UTC)
	var out bytes.Buffer
	missing, err := Write(t.Context(), &out, p)
	require.NoError(t, err)
	compressed, err := gzip.NewReader(&out)
	require.NoError(t, err)
	archive := tar.NewReader(compressed)
	files = map[string]string{}
	for {
		header, err := archive.Next()
		if errors.Is(err, io.EOF) {
			return names, files, missing
		}
		require.NoError(t, err)
		require.EqualValues(t, 0o600, header.Mode)
		content, err := io.ReadAll(archive)
		require.NoError(t, err)
		names = append(names, header.Name)
		files[header.Name] = string(content)
	}
}

const key = "-----BEGIN RSA PRIVATE KEY-----\nMIIEplantedkey\n-----END RSA PRIVATE KEY-----"

// planted are secrets, none of which may be anywhere in a report.
var planted = []string{"planted", "eyJhbGciOiJSUzI1NiJ9", "LS0tLS1CRUdJTiBSU0EgUFJJVkFURSBLRVktLS0tLQo"}

// TestReport lists what is in a report, and plants secrets in all that it is made from and beside that.
func TestReport(t *testing.T) {
	dir := t.TempDir()
	journal, cdi := filepath.Join(dir, "journal"), filepath.Join(dir, "cdi")
	for path, content := range map[string]string{
		"journal/0000-03-00-1.json": `{"driver": "nics.example.com", "config": {"vlan": 7}, "note": "token=plantedtoken"}`,
		"journal/dummy0.names":      `["a"]`,
		"journal/1f3c.claim":        `{"name": "net"}`,
		"journal/id":                "5c0f",
		"journal/config":            `{"version": 1, "config": {"spec": {"driverName": "other.example.com"}}}`,
		// What the journal has not written.
		"journal/kubeconfig":                        "users: [{user: {token: plantedtoken}}]",
		"journal/.0000-03-00-1.tmp":                 "planted",
		"journal/folder.json/x":                     "planted",
		"secret":                                    "planted",
		"cdi/gpu.example.com-gpu.json":              `{"cdiVersion": "0.5.0", "kind": "gpu.example.com/gpu", "containerEdits": {"env": ["LICENCE=planted"]}}`,
		"cdi/nics.example.com.evil-claim_1f3c.json": `{"kind": "nics.example.com.evil/claim", "containerEdits": {"env": ["LICENCE=planted"]}}`,
		"cdi/nics.example.com-claim_1f3c.json": `{"cdiVersion": "0.5.0", "kind": "nics.example.com/claim",
			"devices": [{"name": "1f3c_net", "containerEdits": {"env": ["PCIDEVICE_NET=0000:03:00.1", "PASSWORD=planted"]}}],
			"containerEdits": {"env": ["NETWORKDRIVER_CLAIM_AB=1f3c/sandbox", "HOME=planted"],
				"hooks": [{"hookName": "createRuntime", "path": "/x", "env": ["TOKEN=planted"]}]}}`,
		"cdi/other.example.com_metadata_1f3c_net.json":        `{"kind": "other.example.com/metadata"}`,
		"cdi/networkdriver.cilium.io-claim_2a.json":           `{"kind": "networkdriver.cilium.io/claim"}`,
		"cdi/networkdriver.cilium.io-claim_2a.json.next":      `planted`,
		"cdi/networkdriver.cilium.io-claim_no-spec-file.json": `planted`,
	} {
		path = filepath.Join(dir, path)
		require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o700))
		require.NoError(t, os.WriteFile(path, []byte(content), 0o600))
	}
	for _, link := range []string{"journal/link.json", "cdi/networkdriver.cilium.io-claim_link.json"} {
		require.NoError(t, os.Symlink(filepath.Join(dir, "secret"), filepath.Join(dir, link)))
	}
	t.Setenv("PLANTED_TOKEN", "planted")

	a := &agent{
		config: map[string]string{"journal-dir": journal, "cdi-spec-dir": cdi, "k8s-kubeconfig-path": "/etc/kubeconfig", "some-token": "planted"},
		log: "msg=one token=plantedtoken\nmsg=two error=\"Authorization: Bearer plantedbearer\"\n" +
			"msg=three url=https://user:plantedpass@proxy.example.com/\nmsg=four jwt=eyJhbGciOiJSUzI1NiJ9.eyJwbGFudGVkIjp0cnVlfQ.c2ln\n" + key +
			"\nclient-key-data: LS0tLS1CRUdJTiBSU0EgUFJJVkFURSBLRVktLS0tLQo=\nmsg=five pod=default/app\n",
		dump: `{"networkdriver-journal": [{"password": "planted", "name": "0000-03-00-1", "secret": {"a": 1}}]}`,
	}
	names, files, missing := report(t, Params{Program: a, Links: links})
	require.Equal(t, []string{
		"bugreport/version.txt", "bugreport/config.json", "bugreport/status.json", "bugreport/devices.json", "bugreport/tables.json",
		"bugreport/log.txt", "bugreport/links.json",
		"bugreport/journal/0000-03-00-1.json", "bugreport/journal/1f3c.claim", "bugreport/journal/config", "bugreport/journal/dummy0.names",
		"bugreport/journal/id",
		"bugreport/cdi/networkdriver.cilium.io-claim_2a.json", "bugreport/cdi/nics.example.com-claim_1f3c.json",
		"bugreport/cdi/other.example.com_metadata_1f3c_net.json",
		"bugreport/missing.txt",
	}, names)
	require.Len(t, missing, 1)
	require.Contains(t, missing[0], "cdi/networkdriver.cilium.io-claim_no-spec-file.json: ")
	require.Equal(t, missing[0]+"\n", files["bugreport/missing.txt"])
	for name, content := range files {
		for _, secret := range planted {
			require.NotContains(t, content, secret, name)
		}
		if filepath.Ext(name) == ".json" {
			require.True(t, json.Valid([]byte(content)), "%s: %s", name, content)
		}
	}
	// The rest is there.
	for _, line := range []string{"msg=one", "msg=two", "msg=three url=https://user:[removed]@proxy.example.com/",
		"msg=five pod=default/app"} {
		require.Contains(t, files["bugreport/log.txt"], line)
	}
	require.Contains(t, files["bugreport/config.json"], `"k8s-kubeconfig-path": "/etc/kubeconfig"`)
	require.Contains(t, files["bugreport/tables.json"], `"name": "0000-03-00-1", "secret": {"a": 1}`)
	require.Contains(t, files["bugreport/cdi/nics.example.com-claim_1f3c.json"], "PCIDEVICE_NET=0000:03:00.1")
	require.Contains(t, files["bugreport/cdi/nics.example.com-claim_1f3c.json"], "NETWORKDRIVER_CLAIM_AB=1f3c/sandbox")
	require.Contains(t, files["bugreport/version.txt"], "program: v1.2.3\nkernel: ")
}

// TestWithoutAgent: with the agent away the report has what is on the node, and says what it has not.
func TestWithoutAgent(t *testing.T) {
	journal := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(journal, "id"), []byte("5c0f"), 0o600))
	away := errors.New("neither agent nor operator is running")
	names, files, missing := report(t, Params{
		Program: &agent{err: away}, JournalDir: journal, CDIDir: filepath.Join(journal, "none"),
		Links: func() ([]Link, error) { return nil, errors.New("no netlink") },
	})
	require.Equal(t, []string{"bugreport/version.txt", "bugreport/journal/id", "bugreport/missing.txt"}, names)
	require.Equal(t, []string{
		"cdi: there is no folder " + filepath.Join(journal, "none") + " here", "config.json: " + away.Error(), "status.json: " + away.Error(),
		"devices.json: " + away.Error(), "tables.json: " + away.Error(), "log.txt: " + away.Error(), "links.json: no netlink",
	}, missing)
	require.Contains(t, files["bugreport/version.txt"], "program: not known: "+away.Error())
}

// full is a disk that is full.
type full struct{}

func (full) Write([]byte) (int, error) { return 0, errors.New("no space left on device") }

func TestFullDisk(t *testing.T) {
	_, err := Write(t.Context(), full{}, Params{Program: &agent{log: "x"}, Links: links})
	require.ErrorContains(t, err, "write the report: no space left on device")
}

// TestLinks reads real links.
func TestLinks(t *testing.T) {
	testenv.Privileged(t)
	found, err := ReadLinks()
	require.NoError(t, err)
	require.Equal(t, "lo", found[0].Name)
}
