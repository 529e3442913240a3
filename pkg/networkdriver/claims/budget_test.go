// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package claims

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cilium/hive"
	"github.com/cilium/hive/cell"
	"github.com/stretchr/testify/require"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	apiclient "github.com/cilium/networkdriver/pkg/client"
)

// kubeletPatience is what kubelet gives a call of Prepare; its next try comes a minute or more later.
const kubeletPatience = 45 * time.Second

// slowServer is an API server with claims that answers after a while, and may refuse to have claims applied, as it does where
// their parameters are not as it would write them.
type slowServer struct {
	latency time.Duration
	refuse  bool
	claims  map[string]*resourceapi.ResourceClaim

	mu       sync.Mutex // guards the field below
	requests map[string]int
}

func (s *slowServer) RoundTrip(r *http.Request) (*http.Response, error) {
	select {
	case <-time.After(s.latency):
	case <-r.Context().Done():
		return nil, r.Context().Err()
	}
	s.mu.Lock()
	s.requests[r.Method]++
	s.mu.Unlock()
	name := strings.TrimSuffix(r.URL.Path[strings.Index(r.URL.Path, "/resourceclaims/")+len("/resourceclaims/"):], "/status")
	code, answer := http.StatusOK, any(s.claims[name])
	switch {
	case r.Method == http.MethodPatch && s.refuse:
		code, answer = http.StatusUnprocessableEntity, metav1.Status{
			TypeMeta: metav1.TypeMeta{Kind: "Status", APIVersion: "v1"}, Status: metav1.StatusFailure, Code: http.StatusUnprocessableEntity,
			Reason:  metav1.StatusReasonInvalid,
			Details: &metav1.StatusDetails{Causes: []metav1.StatusCause{{Field: "status.allocation"}}},
		}
	case r.Method == http.MethodPatch:
		var applied resourceapi.ResourceClaim
		body, err := io.ReadAll(r.Body)
		if err != nil {
			return nil, err
		}
		if err := json.Unmarshal(body, &applied); err != nil {
			return nil, err
		}
		claim := s.claims[name].DeepCopy()
		claim.Status.Devices = applied.Status.Devices
		answer = claim
	}
	body, err := json.Marshal(answer)
	if err != nil {
		return nil, err
	}
	return &http.Response{
		StatusCode: code, Header: http.Header{"Content-Type": {"application/json"}}, Request: r, Body: io.NopCloser(bytes.NewReader(body)),
	}, nil
}

// clientsOf returns the agent's two clients of the server.
func clientsOf(t *testing.T, server http.RoundTripper) (background kubernetes.Interface, prompt apiclient.Prompt) {
	t.Helper()
	config := filepath.Join(t.TempDir(), "kubeconfig")
	require.NoError(t, os.WriteFile(config, []byte(`{"clusters": [{"name": "c", "cluster": {"server": "http://api.example"}}],
		"contexts": [{"name": "c", "context": {"cluster": "c"}}], "current-context": "c"}`), 0o600))
	h := hive.New(apiclient.Cell,
		cell.DecorateAll(func(cfg *rest.Config) *rest.Config {
			cfg.Transport = server
			return cfg
		}),
		cell.Invoke(func(b kubernetes.Interface, p apiclient.Prompt) { background, prompt = b, p }))
	hive.AddConfigOverride(h, func(c *apiclient.Config) { c.K8sKubeconfigPath = config })
	require.NoError(t, h.Populate(slog.New(slog.DiscardHandler)))
	return background, prompt
}

// After a reboot kubelet has 100 claims prepared at once, while the agent has more to write in the background than it may.
// All are prepared within the time of one call.
func TestPrepareAfterReboot(t *testing.T) {
	const count = 100
	for name, tc := range map[string]struct {
		refuse   bool
		requests int // for each claim
	}{
		"applied":     {false, 2},
		"not applied": {true, 4},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				server := &slowServer{latency: 20 * time.Millisecond, refuse: tc.refuse, claims: map[string]*resourceapi.ResourceClaim{}, requests: map[string]int{}}
				var devices []string
				for i := range count {
					device, claim := fmt.Sprintf("d%d", i), fmt.Sprintf("c%d", i)
					devices = append(devices, device)
					server.claims[claim] = newClaim(claim, with("net", device), fromClaim(parameters))
				}
				background, prompt := clientsOf(t, server)
				f := newFixture(t, devices...)
				promptClaims := NewClaimClient(prompt.ResourceV1())
				f.world.StatusWriter = NewWriter(WriterParams{
					Logger: slog.New(slog.DiscardHandler), DB: f.db, Allocations: f.allocations,
					Client: promptClaims, Background: NewClaimClient(background.ResourceV1()),
					DriverName: testDriver, NodeName: testNode, BootID: testBoot,
				})

				ctx, cancel := context.WithCancel(t.Context())
				var others, calls sync.WaitGroup
				for range 1000 {
					others.Go(func() { _, _ = background.ResourceV1().ResourceClaims("default").List(ctx, metav1.ListOptions{}) })
				}
				started := time.Now()
				for claim := range server.claims {
					calls.Go(func() {
						// kubelet's library reads the claim first, by the same client.
						object, err := promptClaims.GetClaim(ctx, "default", claim)
						if err == nil {
							_, err = f.Prepare(ctx, object)
						}
						if err != nil {
							t.Errorf("claim %s: %v", claim, err)
						}
					})
				}
				calls.Wait()
				took := time.Since(started)
				cancel()
				others.Wait()
				require.Len(t, f.rows(), count)
				require.Less(t, took, kubeletPatience/4)
				server.mu.Lock()
				defer server.mu.Unlock()
				writes := server.requests[http.MethodPatch] + server.requests[http.MethodPut]
				t.Logf("%d claims, %d requests of each, in %s; writes: %d, reads with those of the background: %d",
					count, tc.requests, took, writes, server.requests[http.MethodGet])
				require.Equal(t, count*tc.requests/2, writes)
			})
		})
	}
}
